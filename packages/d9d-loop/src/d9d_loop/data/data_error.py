"""Error for data that cannot be read while a job runs."""


class DataError(RuntimeError):
    """A sample could not be read or collated, or a worker died or timed out. The message names the sample.

    With workers, the message also names the worker.
    """
