"""The schedules of the literature, each from its paper."""
