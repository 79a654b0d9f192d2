"""Error for data that cannot be read while a job runs."""


class DataError(RuntimeError):
    """Error of a sample that could not be read or collated, or of a worker that died or timed out.

    The message names the sample and, with workers, the worker.
    """
