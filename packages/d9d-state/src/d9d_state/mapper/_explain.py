"""The text form of a mapper, for reading it before trusting it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from d9d_state.mapper.graph import StateMapper


def explain(mapper: "StateMapper") -> str:
    """One line for each operation, and one for each tensor that no operation touches."""
    sources = {wire: name for name, wire in mapper.input_wires.items()}
    targets = {wire: name for name, wire in mapper.output_wires.items()}
    lines = [f"{len(sources)} tensors -> {len(targets)} tensors, {len(mapper.groups)} groups"]

    def show(wires: tuple[int, ...], names: dict[int, str]) -> str:
        return ", ".join(names.get(wire, f"(value {wire})") for wire in wires)

    touched: set[int] = set()
    for node in mapper.nodes:
        touched.update(node.inputs, node.outputs)
        lines.append(f"  {show(node.inputs, sources)} -> {node.operation.describe()} -> {show(node.outputs, targets)}")
    lines += [f"  {name} -> {targets.get(wire, '(dropped)')}" for wire, name in sources.items() if wire not in touched]
    lines += [f"  (kept) -> {name}" for wire, name in targets.items() if wire in mapper.unset_wires]
    return "\n".join(lines)
