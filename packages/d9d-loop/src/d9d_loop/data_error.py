"""Error of training data, in a module without imports: commands map it to an exit code."""


class DataError(RuntimeError):
    """Error of a sample that could not be read or collated, or of a worker that died or timed out.

    The message names the sample and, with workers, the worker.
    """
