"""Id of a run, which is stored in its checkpoints and in its steps in local tiers."""

import uuid
from typing import final

from d9d_dist import DistributedContext, gather_json
from d9d_state import _files
from d9d_state._member import AnyPath
from d9d_state._ranks import failing_together, is_main
from d9d_state.checkpoint._folder import RUN_ID_NAME, newest_first


@final
class RunId:
    """Id of a store's run: the given id, else the newest checkpoint's, else from the `run_id` file, else a new id."""

    def __init__(self, root: AnyPath, given: str | None) -> None:
        self.given = given
        self._root = root
        self._current: str | None = given
        self._written = ""

    def known(self) -> str | None:
        """Return the id of the run that the store continues, or `None`. Main process only."""
        newest = next(newest_first(self._root, only_run=self.given), None)
        if newest is not None or self.given is not None:
            return self.given if newest is None else newest.run_id
        path = self._root / RUN_ID_NAME
        return path.read_bytes().decode() if path.is_file() else None

    def current(self) -> str:
        """Return the id under which the store saves. Main process only."""
        if self._current is None:
            self._current = self.known() or uuid.uuid4().hex
        return self._current

    def shared_known(self, ctx: DistributedContext | None) -> str | None:
        """Return the main process's `known`. Collective; raises `StateError` on every rank if it cannot be read."""
        run_id = None
        with failing_together(ctx, f"{self._root} cannot be read"):
            run_id = self.known() if is_main(ctx) else None
        found = gather_json(run_id, alone=ctx is None)[0]
        return None if found is None else str(found)

    def written(self, ctx: DistributedContext | None) -> str:
        """Return the main process's `current` and write it beside the checkpoints. Collective on the first call.

        Without a given id or a checkpoint, this file identifies the run's steps in local tiers. If a user deletes the
        folder to start from scratch, these steps are not used.
        """
        if not self._written:
            run_id = ""
            with failing_together(ctx, f"{self._root} could not be written"):
                if is_main(ctx):
                    run_id = self.current()
                    _files.make_folder(self._root)
                    _files.replace_file(self._root / RUN_ID_NAME, run_id.encode())
            self._written = str(gather_json(run_id, alone=ctx is None)[0])
        return self._written
