"""What goes wrong with state although nobody asked for anything impossible: damage, full disks, a failing rank."""


class StateError(RuntimeError):
    """State could not be written, or what was written is damaged. The message names the file and the rank."""
