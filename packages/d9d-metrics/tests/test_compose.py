import torch

from d9d_metrics import Compose, Max, Sum, compute_metrics


def test_updates_all_metrics_and_names_their_values() -> None:
    metric = Compose({"sum": Sum(), "more": Compose({"max": Max()})})
    metric.update(torch.tensor([1.0, 2.0]))
    metric.update(values=torch.tensor([-1.0]))
    assert compute_metrics({"m": metric}, None) == {"m/sum": 2.0, "m/more/max": 2.0}
    assert list(metric.accumulators()) == ["sum/total", "more/max/largest"]
    loaded = Compose({"sum": Sum(), "more": Compose({"max": Max()})})
    loaded.load_state_dict(metric.state_dict())
    metric.reset()
    assert compute_metrics({"m": loaded}, None) == {"m/sum": 2.0, "m/more/max": 2.0}
