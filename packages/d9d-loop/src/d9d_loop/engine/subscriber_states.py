"""States of event subscribers in a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from d9d_dist import UserError
from d9d_loop.engine.caller_state import decode_state, encode_state
from d9d_loop.event_bus import Events


def subscriber_states(events: Events) -> dict[str, JsonValue]:
    """Return this rank's states of the subscribers, by name. Raise `UserError` for a state that is not JSON."""
    states: dict[str, JsonValue] = {}
    for name, subscriber in events.stateful.items():
        states[name] = encode_state(subscriber.state_dict())
        try:
            json.dumps(states[name])
        except TypeError as error:
            raise UserError(
                f"the subscriber {name} returned a state that cannot be saved: {error}; expected JSON values and "
                "tensors from its state_dict()."
            ) from error
    return states


def load_subscribers(events: Events, rank_states: Sequence[Mapping[str, Any]]) -> None:
    """Load the subscribers' states from a checkpoint. A subscriber without a saved state keeps its own.

    Args:
        events: Event bus of the job.
        rank_states: State that a rank of the same role saved; without one, the states of all ranks.

    Raises:
        UserError: If the states of a subscriber differ between `rank_states`: none of them is this rank's.
    """
    for name, subscriber in events.stateful.items():
        first, *others = [each["subscribers"].get(name) for each in rank_states]
        if any(other != first for other in others):
            raise UserError(
                f"the state of the subscriber {name} differed between the ranks that saved it, and this mesh has other "
                "ranks; expected equal states. Resume on the mesh of the save, or keep a state that is equal on all "
                "ranks."
            )
        if first is not None:
            subscriber.load_state_dict(decode_state(first))
