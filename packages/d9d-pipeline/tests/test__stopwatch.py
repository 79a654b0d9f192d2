import time

import torch

from d9d_pipeline._stopwatch import Stopwatch


def test_seconds_are_relative_to_the_start() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    first = stopwatch.mark()
    time.sleep(0.01)
    second = stopwatch.mark()
    assert 0 <= stopwatch.seconds(first) <= stopwatch.seconds(second) - 0.01
