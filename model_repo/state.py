"""The folder in which a running server keeps its model repository, socket and logs, and its shared memory's prefix."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from pathlib import Path

from hybridtrt.model_repo.preflight import SHM, ServeError


def default_folder(http_port: int) -> Path:
    """One folder for each user and HTTP port."""
    return Path(tempfile.gettempdir()) / f"hybridtrt-{os.getuid()}" / str(http_port)


class State:
    """The folder, locked for this process. What a killed server left there, and in shared memory, is removed."""

    def __init__(self, folder: Path) -> None:
        """Raises: ServeError: the folder cannot be used, or another server uses it."""
        self.folder = folder
        try:
            for path in (folder.parent, folder):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.stat().st_uid not in (os.getuid(), 0):
                    raise ServeError(f"{path} belongs to another user")
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ServeError(f"another server uses {folder}") from None
        except OSError as error:
            raise ServeError(f"{folder} cannot be used: {error.strerror}") from None
        self._prefix_file = folder / "shm-prefix"
        if self._prefix_file.exists():
            self.shm_prefix = self._prefix_file.read_text()
            self.remove_shm()
        self.shm_prefix = f"hybridtrt_{secrets.token_hex(4)}_"
        self._prefix_file.write_text(self.shm_prefix)
        for log in (self.engine_log, self.triton_log):
            log.unlink(missing_ok=True)

    @property
    def socket(self) -> Path:
        return self.folder / "engine.sock"

    @property
    def repository(self) -> Path:
        return self.folder / "models"

    @property
    def backends(self) -> Path:
        return self.folder / "backends"

    @property
    def libraries(self) -> Path:
        return self.folder / "lib"

    @property
    def engine_log(self) -> Path:
        return self.folder / "engine.log"

    @property
    def triton_log(self) -> Path:
        return self.folder / "triton.log"

    def remove_shm(self) -> None:
        """Delete this server's shared memory regions; no process of it may run any more."""
        if self.shm_prefix.startswith("hybridtrt_"):
            for region in SHM.glob(f"{self.shm_prefix}*"):
                with contextlib.suppress(OSError):
                    region.unlink()

    def close(self) -> None:
        """Remove what only a running server needs; the logs stay."""
        self.remove_shm()
        self.socket.unlink(missing_ok=True)
        self._prefix_file.unlink(missing_ok=True)
        self._lock.close()
