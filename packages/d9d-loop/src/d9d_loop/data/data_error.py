"""The error of data that cannot be read while a job runs."""


class DataError(RuntimeError):
    """A sample could not be read, or the process that was to read it is gone. Names both."""
