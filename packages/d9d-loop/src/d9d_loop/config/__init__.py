"""Configuration of jobs: files, command lines, presets."""
