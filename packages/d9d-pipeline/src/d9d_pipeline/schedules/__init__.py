"""Pipeline schedules from the literature; each class cites its paper."""
