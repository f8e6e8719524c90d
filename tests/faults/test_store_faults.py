"""An object store that misbehaves under a save, through a real proxy: each fault costs time or that save.

Uploads, the commit and the uploader process are the real ones. After each fault there is exactly one commit
or none, all bytes are of one version, and no unfinished upload stays.
"""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests import host_copies
from tests.conftest import BUCKET
from tests.host_copies import Trainer, versions_in
from tests.runs import HANG_S, RunFile, rows, start, wait_for, yatt
from tests.saves import committed, save
from tests.store_proxy import Fault, StoreProxy, after
from tests.worker_process import ATTEMPT, WorkerServer, worker_with_server, write_run
from yatt.adapters.node_local.host_segment import AREAS
from yatt.checkpoint.commit.manifest import Checkpoints
from yatt.checkpoint.store import store as store_module
from yatt.checkpoint.store.patient import PatientStore
from yatt.checkpoint.store.store import Store, open_store
from yatt.checkpoint.store.unfinished import abort_uploads
from yatt.core.attempts.checkpoint_names import manifest_name
from yatt.core.attempts.claims import Commit
from yatt.errors import CheckpointError, StoreUnreachable
from yatt.obs.metrics import STEP
from yatt.records import message as m

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]
ALWAYS = 10**6
STALL_S, LIMIT_S = 2.0, 60.0
EXPIRED = (400, "ExpiredToken")


@pytest.fixture
def proxy(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProxy]:
    """Files of 6 MiB in two parts."""
    monkeypatch.setattr(store_module, "UPLOAD_PART_BYTES", 5 << 20)
    monkeypatch.setattr(host_copies, "BYTES", 3 << 20)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    with StoreProxy(s3_endpoint) as proxy:
        yield proxy


def trainer_of(proxy: StoreProxy, folder: Path) -> Trainer:
    """A rank of attempt 1, which has begun."""
    Checkpoints(store_at(folder, proxy.server), 1).adopt(None)
    return Trainer(folder)


def url_of(folder: Path) -> str:
    return f"s3://{BUCKET}/faults-{folder.name}"


def store_at(folder: Path, endpoint: str, limit_s: float = LIMIT_S) -> Store:
    return PatientStore(open_store(url_of(folder), {"endpoint_url": endpoint}, STALL_S), limit_s=limit_s)


def unfinished(proxy: StoreProxy, folder: Path) -> list[str]:
    client = boto3.client("s3", endpoint_url=proxy.server)
    listed = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [upload["Key"] for upload in listed if folder.name in upload["Key"]]


PASSING = {
    "a burst of 500": [Fault("answer", times=6, status=500, code="InternalError")],
    "a burst of SlowDown": [Fault("answer", times=12)],
    "SlowDown for one operation": [Fault("answer", "UploadPart", 9)],
    "a part is never answered": [Fault("hang", "UploadPart")],
    "the body of a part is not read": [Fault("stall", "UploadPart")],
    "parts are cut": [Fault("reset", "UploadPart", 4)],
    "the reply to a part is lost": [Fault("drop", "UploadPart", 2)],
    "the reply to the beginning is lost": [Fault("drop", "CreateMultipartUpload")],
    "the reply to the completion is lost": [Fault("drop", "CompleteMultipartUpload")],
    "the completion is never answered": [Fault("hang", "CompleteMultipartUpload")],
    "the completion is refused": [Fault("answer", "CompleteMultipartUpload", 4, 500, "InternalError")],
    "the reply to the commit is lost": [Fault("drop", "Create")],
    "all replies to the commit are lost": [Fault("drop", "Create", 3)],
    "the commit is never answered": [Fault("hang", "Create")],
    "sizes cannot be read": [Fault("drop", "HeadObject", 3)],
}


@pytest.mark.parametrize("kind", PASSING)
def test_a_fault_that_passes_costs_time_and_one_commit_is_there(
    tmp_path: Path, proxy: StoreProxy, kind: str
) -> None:
    trainer = trainer_of(proxy, tmp_path)
    faults = proxy.faults = [Fault(**vars(fault)) for fault in PASSING[kind]]
    save(store_at(tmp_path, proxy.endpoint), trainer)
    assert proxy.count(".*", faults[0].what), "the fault has struck"
    assert committed(store_at(tmp_path, proxy.server)) == [1]
    abort_uploads(url_of(tmp_path), {"endpoint_url": proxy.server}, before=2)
    assert not unfinished(proxy, tmp_path)


def test_a_store_that_is_away_for_a_while_costs_time(tmp_path: Path, proxy: StoreProxy) -> None:
    store, trainer = store_at(tmp_path, proxy.endpoint, limit_s=200.0), trainer_of(proxy, tmp_path)
    proxy.bytes_per_s = 8e6
    timers = [after(0.5, proxy.away), after(3.0, proxy.back)]
    save(store, trainer)
    for timer in timers:
        timer.join()
    assert committed(store_at(tmp_path, proxy.server)) == [1]


def test_a_slow_store_is_no_stalled_one(tmp_path: Path, proxy: StoreProxy) -> None:
    """A part takes longer than the limit of a stall; nothing is sent twice."""
    trainer = trainer_of(proxy, tmp_path)
    proxy.bytes_per_s = (5 << 20) / (STALL_S * 1.5)
    save(store_at(tmp_path, proxy.endpoint), trainer)
    assert committed(store_at(tmp_path, proxy.server)) == [1]
    assert proxy.count("UploadPart") == 2 * host_copies.FILES


FATAL = {
    "expired from the first part on": Fault("answer", "UploadPart|Ab.*|Del.*", ALWAYS, *EXPIRED, skip=1),
    "expired at the completion": Fault("answer", "Complete.*|Ab.*|Del.*", ALWAYS, *EXPIRED),
    "expired at the commit": Fault("answer", "Create", ALWAYS, *EXPIRED),
    "no right to write": Fault("answer", "UploadPart", ALWAYS, 403, "AccessDenied"),
    "never answers a part": Fault("hang", "UploadPart", ALWAYS),
    "away for longer than the limit": Fault("reset", ".*", ALWAYS),
}


@pytest.mark.parametrize("kind", FATAL)
def test_a_fault_that_stays_costs_this_save_and_not_the_next(
    tmp_path: Path, proxy: StoreProxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fault, trainer = FATAL[kind], trainer_of(proxy, tmp_path)
    proxy.faults = [Fault(**vars(fault))]
    with pytest.raises(StoreUnreachable) as caught:
        save(store_at(tmp_path, proxy.endpoint, limit_s=3.0), trainer)
    assert caught.value.is_passing == (fault.what != "answer"), caught.value
    proxy.faults.clear()
    assert committed(store_at(tmp_path, proxy.server)) == []
    trainer.becomes(2)
    save(store_at(tmp_path, proxy.endpoint), trainer, 2)
    assert committed(store_at(tmp_path, proxy.server)) == [2]
    abort_uploads(url_of(tmp_path), {"endpoint_url": proxy.server}, before=2)
    assert not unfinished(proxy, tmp_path)


def test_a_refused_part_aborts_its_upload_at_once(tmp_path: Path, proxy: StoreProxy) -> None:
    trainer = trainer_of(proxy, tmp_path)
    proxy.faults = [Fault("answer", "UploadPart", ALWAYS, 403, "AccessDenied")]
    with pytest.raises(StoreUnreachable):
        save(store_at(tmp_path, proxy.endpoint), trainer)
    assert proxy.count("AbortMultipartUpload", "passed")
    assert not unfinished(proxy, tmp_path)


@pytest.mark.parametrize("what", ["cut", "hang", "answer"])
def test_a_read_that_breaks_off_is_repeated(tmp_path: Path, proxy: StoreProxy, what: str) -> None:
    save(store_at(tmp_path, proxy.server), trainer_of(proxy, tmp_path))
    proxy.faults = [Fault(what, "GetObject", 2)]
    store = store_at(tmp_path, proxy.endpoint)
    manifest = Checkpoints(store_at(tmp_path, proxy.server), 2).newest().manifest
    assert manifest is not None and versions_in(store, manifest.files) == {1}
    assert proxy.count("GetObject", what) == 2


def test_another_attempts_commit_is_no_lost_reply_of_ours(tmp_path: Path, proxy: StoreProxy) -> None:
    """The store refuses the commit because the name exists, and its content is not ours."""
    trainer = trainer_of(proxy, tmp_path)
    store_at(tmp_path, proxy.server).write(manifest_name(Commit(1, 1)), b"another's")
    proxy.faults = [Fault("drop", "Create")]
    with pytest.raises(CheckpointError, match="was committed already"):
        save(store_at(tmp_path, proxy.endpoint), trainer)
    assert store_at(tmp_path, proxy.server).read(manifest_name(Commit(1, 1))) == b"another's"


def uploader_run(folder: Path, proxy: StoreProxy) -> Path:
    return write_run(folder, {
        "launch": {"phase_timeout_s": 60},
        "checkpoint": {
            "url": url_of(folder), "storage_options": {"endpoint_url": proxy.endpoint}, "stall_s": STALL_S,
        },
    })  # fmt: skip


def order(trainer: Trainer, prefix: str, iteration: int = 1) -> m.Upload:
    return m.Upload(iteration=iteration, url=prefix, stems=(str(trainer.stem),))


def test_the_uploader_process_tells_of_faults_and_lives_on(tmp_path: Path, proxy: StoreProxy) -> None:
    run, trainer = uploader_run(tmp_path, proxy), Trainer(tmp_path, attempt=ATTEMPT)
    upstream = store_at(tmp_path, proxy.server)

    async def scene() -> None:
        async with worker_with_server(run, "yatt.uploader") as server:
            await _through_faults(server)

    async def _through_faults(server: WorkerServer) -> None:
        proxy.faults = [Fault("answer", "PutObject|UploadPart", 30)]
        uploaded = await server.order(order(trainer, "p/one"))
        assert isinstance(uploaded, m.Uploaded), uploaded
        assert versions_in(upstream, uploaded.files) == {1}
        waits = [beat.waits_for for beat in server.beats if beat.waits_for]
        assert any("reduce your request rate" in wait or "told by the proxy" in wait for wait in waits), waits
        proxy.faults = [Fault("answer", "PutObject|UploadPart", ALWAYS, *EXPIRED)]
        failed = await server.order(order(trainer, "p/two"))
        assert isinstance(failed, m.Failed) and "ExpiredToken" in failed.error, failed
        proxy.faults = []
        assert isinstance(await server.order(order(trainer, "p/three")), m.Uploaded)
        assert await server.order(m.Stop()) == m.Done()
        assert await server.ended() == 0

    asyncio.run(scene())


def test_training_goes_on_beside_a_request_that_is_never_answered(tmp_path: Path, proxy: StoreProxy) -> None:
    """The host copy is copied aside and changes; the save is whole when the store answers again."""
    run, trainer = uploader_run(tmp_path, proxy), Trainer(tmp_path, attempt=ATTEMPT)

    async def scene() -> None:
        async with worker_with_server(run, "yatt.uploader") as server:
            proxy.faults = [Fault("hang", "PutObject", ALWAYS)]
            uploading = asyncio.ensure_future(server.order(order(trainer, "p/one")))
            while not proxy.count("PutObject", "hang"):
                await asyncio.sleep(0.05)
            copied = await server.order(m.Detach(areas=AREAS), 20.0)
            assert isinstance(copied, m.Detached) and copied.size_bytes > 0
            trainer.becomes(2)
            proxy.faults = []
            uploaded = await uploading
            assert isinstance(uploaded, m.Uploaded), uploaded
            assert versions_in(store_at(tmp_path, proxy.server), uploaded.files) == {1}

    asyncio.run(scene())


SLOW_REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.15)
    return len(set(solution_str)) / 8
"""


def test_a_run_trains_on_while_its_credentials_have_expired_and_status_tells(
    tmp_path: Path, s3_endpoint: str
) -> None:
    """Saves fail; then the credentials are valid again, as after a renewal, and saves are committed."""
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    with StoreProxy(s3_endpoint) as proxy:
        run = RunFile(tmp_path, {
            "launch": {"nodes": 1}, "trainer": {"total_iterations": 6},
            "checkpoint": {"url": url_of(tmp_path), "storage_options": {"endpoint_url": proxy.endpoint}},
        })  # fmt: skip
        process = start("run", str(run.write()))
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
        reader.start()
        try:
            wait_for(lambda: events(run, "ckpt.commit"), timeout_s=90, what="a commit")
            proxy.faults = [Fault("answer", "PutObject", ALWAYS, *EXPIRED)]
            wait_for(lambda: events(run, "ckpt.fail"), timeout_s=90, what="a failed save")
            shown = yatt("status", str(run.run_dir)).stdout
            proxy.faults = []
            assert process.wait(timeout=300) == 0, said
        finally:
            process.kill()
            process.wait()
            reader.join(timeout=HANG_S)
            process.stdout.close()
    (alarm,) = [line for line in shown.splitlines() if "ALARM" in line]
    assert "failed: " in alarm and "ExpiredToken" in alarm, shown
    assert any("training goes on" in line and "ExpiredToken" in line for line in said), said
    assert [row[STEP] for row in rows(run.run_dir / "metrics.jsonl")] == list(range(1, 7))
    assert events(run, "ckpt.commit")[-1]["iteration"] == 6
    assert {event["attempt"] for event in events(run)} == {1}
    assert not unfinished(proxy, tmp_path)


def events(run: RunFile, kind: str = "") -> list[dict]:
    path = run.run_dir / "events.jsonl"
    return [e for e in rows(path) if not kind or e["kind"] == kind] if path.exists() else []
