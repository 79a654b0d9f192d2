from d9d_pipeline import Backward, BackwardInput, BackwardWeight, Forward, Overlap
from d9d_pipeline.actions import ComputeLoss, ReceiveInput, ReceiveOutputGradient, SendInputGradient, SendOutput, parts


def test_the_text_of_an_action_is_a_letter_and_a_microbatch() -> None:
    actions = [Forward(1, 2), Backward(1, 2), BackwardInput(1, 2), BackwardWeight(1, 2), ComputeLoss(1, 2)]
    assert [str(action) for action in actions] == ["F2", "B2", "I2", "W2", "L2"]
    transfers = [SendOutput(1, 2, 3), ReceiveInput(1, 2, 3), SendInputGradient(1, 2, 3), ReceiveOutputGradient(1, 2, 3)]
    assert [str(transfer) for transfer in transfers] == ["f2>3", "f2<3", "b2>3", "b2<3"]
    assert str(Overlap(Forward(0, 4), Backward(1, 2))) == "(F4+B2)"


def test_actions_of_different_types_are_unequal() -> None:
    assert len({Forward(0, 0), Backward(0, 0), BackwardInput(0, 0), BackwardWeight(0, 0), ComputeLoss(0, 0)}) == 5


def test_parts_of_an_action_are_forwards_and_backwards() -> None:
    overlap = Overlap(Forward(0, 4), BackwardInput(1, 2))
    assert parts(overlap) == (Forward(0, 4), BackwardInput(1, 2))
    assert parts(BackwardWeight(1, 2)) == (BackwardWeight(1, 2),)
    assert parts(ComputeLoss(1, 2)) == parts(SendOutput(1, 2, 3)) == ()
