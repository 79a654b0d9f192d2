"""Strict YAML parser for configuration files: tags, anchors, aliases and duplicate keys are errors."""

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import ConstructorError


def parse_yaml(text: str) -> Any:
    """Parse a YAML document. Invalid documents and unsupported features raise `ValueError` with line and column."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506  (a subclass of the safe loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


class _StrictLoader(yaml.SafeLoader):
    """Safe loader that also refuses tags, anchors, aliases, duplicate keys and keys that are not strings."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise ConstructorError(None, None, "aliases are not allowed", event.start_mark)
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            raise ConstructorError(None, None, "anchors are not allowed", event.start_mark)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise ConstructorError(None, None, "tags are not allowed", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, (key, (key_node, _)) in enumerate(zip(keys, node.value, strict=True)):
            if not isinstance(key, str):
                raise ConstructorError(
                    None, None, f"the key {key!r} is not a string; put it in quotes", key_node.start_mark
                )
            if key in keys[:place]:
                raise ConstructorError(None, None, f"the key {key} is duplicated", key_node.start_mark)
        return super().construct_mapping(node, deep)
