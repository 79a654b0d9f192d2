"""Data sheets and fitted constants of accelerators, one TOML file each."""
