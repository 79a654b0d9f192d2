"""Where measured values go; the public names are listed in `d9d_metrics`."""
