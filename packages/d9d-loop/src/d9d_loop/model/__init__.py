"""Model providers, and the build, checks and placement of a model."""
