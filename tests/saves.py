"""One save as uploader and leader make it, and what a later attempt finds of it."""

import msgspec

from tests import host_copies
from tests.host_copies import Trainer, versions_in
from yatt.adapters.node_local.host_segment import Stamp
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.commit.manifest_format import Manifest
from yatt.checkpoint.store.store import Store
from yatt.uploader.upload import Throttle, UploadJob


def save(store: Store, trainer: Trainer, iteration: int = 1) -> None:
    """Uploads and commits a save of attempt 1."""
    checkpoints = Checkpoints(store, 1)
    stamp, prefix = Stamp(1, iteration), checkpoints.prefix(iteration)
    job = UploadJob(store, prefix, [trainer.stem], stamp, throttle=Throttle(0), tick=lambda: None)
    try:
        files = job.run()
        common = msgspec.Raw(b"{}")
        draft = Manifest(iteration=iteration, attempt=1, config_hash="", files=files, nodes=(), common=common)
        checkpoints.commit(draft)
    finally:
        job.close()


def committed(store: Store) -> list[int]:
    """Committed iterations. The newest is whole: every byte is compared."""
    checkpoints = Checkpoints(store, 2)
    iterations = sorted(commit.iteration for commit in checkpoints.commits())
    if iterations:
        manifest = checkpoints.newest().manifest
        assert manifest is not None and manifest.iteration == iterations[-1]
        assert len(manifest.files) == host_copies.FILES
        assert versions_in(store, manifest.files) == {manifest.iteration}
    return iterations
