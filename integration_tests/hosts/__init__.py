"""Several hosts on one machine, for tests of jobs over a network that fails."""
