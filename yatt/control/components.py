"""The components of one controller that need neither files nor other nodes, created top to bottom."""

from dataclasses import dataclass

from yatt.adapters.net.channel import Channel
from yatt.control.gpus.arbiter import Arbiter, Holding
from yatt.control.gpus.engine_meter import EngineMeter
from yatt.control.gpus.engines import LocalEngines
from yatt.control.gpus.judge_folders import JudgeFolders
from yatt.control.gpus.prepared_requests import PreparedRequests
from yatt.control.gpus.processes.media_host import MediaHost
from yatt.control.gpus.processes.supervisor import Supervisor
from yatt.control.gpus.seen_pictures import SeenPictures
from yatt.control.gpus.unfit import UnfitEngines
from yatt.control.gpus.weights.publications import Publications
from yatt.control.gpus.weights.uploads import Uploads
from yatt.control.gpus.weights.weight_segments import GivenWeights
from yatt.control.gpus.workers import Workers
from yatt.control.membership.failure_reports import FailureReports
from yatt.control.membership.peers import Peers
from yatt.control.membership.progress import Progress
from yatt.control.node import Node
from yatt.control.rollouts.rooms import RoomAnnouncer
from yatt.control.rollouts.router import Router
from yatt.control.rollouts.scoring.reward_pool import RewardPool
from yatt.core.gpus.placement import ROLLOUT
from yatt.obs.story.events import EventLog
from yatt.records.load import NodeLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The components of every controller: on the leader, on trainer nodes and on engine nodes."""

    peers: Peers
    reports: FailureReports
    supervisor: Supervisor
    engines: LocalEngines
    progress: Progress
    publications: Publications
    given_weights: GivenWeights
    workers: Workers
    judges: JudgeFolders
    uploads: Uploads
    rewards: RewardPool
    media: MediaHost
    prepared: PreparedRequests
    pictures: SeenPictures | None
    router: Router
    rooms: RoomAnnouncer
    meter: EngineMeter
    unfit: UnfitEngines
    arbiter: Arbiter

    def load(self) -> NodeLoad:
        """Returns what this node's engines and requests are doing now."""
        router, engines, genrms = self.router, self.engines, self.router.genrms
        return NodeLoad(
            slabs=engines.loads(),
            steps=dict(self.meter.steps),
            costs=dict(self.meter.costs),
            built=self.meter.built(),
            unfit=self.unfit.found(),
            num_waiting=router.num_waiting(ROLLOUT) + router.expected + engines.num_waiting(ROLLOUT),
            num_asked={role: router.num_asked(role) for role in genrms},
        )


def build_components(
    node: Node, channel: Channel, peers: Peers, events: EventLog, reports: FailureReports
) -> Components:
    """Creates the components; starts nothing.

    Args:
        channel: the channel to this node's workers.
    """
    supervisor = Supervisor(node, events)
    engines = LocalEngines(channel, node.config)
    progress = Progress(supervisor.work)
    publications = Publications(node, peers, events, progress)
    unfit = UnfitEngines(node, events, reports.failed)
    workers = Workers(node, supervisor, engines, publications, unfit, events)
    uploads = Uploads(node, supervisor, channel, events)
    rewards = RewardPool(node.config, supervisor, channel, events, reports.failed, progress.done)
    media = MediaHost(node, supervisor, channel, events, reports.failed)
    prepared, pictures = PreparedRequests(media.prepare_media, node.media_folder), None
    if node.config.data.media_store:
        engines.prepare_with(prepared)
        cache_bytes = node.config.media.cache_bytes
        pictures = SeenPictures(media.prepare_media, workers.order, str(node.media_folder), cache_bytes)
    router = Router(node, engines, peers, progress)
    rooms = RoomAnnouncer(node, engines, peers)
    meter = EngineMeter(supervisor, engines)
    holding = meter.metered(
        Holding(wake=workers.wake, sleep=workers.sleep, restart=workers.restart, take_back=workers.take_back)
    )
    arbiter = Arbiter(node, supervisor, events, holding, reports.failed)
    unfit.subscribe(arbiter.give_back)
    return Components(
        peers=peers,
        reports=reports,
        supervisor=supervisor,
        engines=engines,
        progress=progress,
        publications=publications,
        given_weights=GivenWeights(node, publications.fetched),
        workers=workers,
        judges=JudgeFolders(node, supervisor),
        uploads=uploads,
        rewards=rewards,
        media=media,
        prepared=prepared,
        pictures=pictures,
        router=router,
        rooms=rooms,
        meter=meter,
        unfit=unfit,
        arbiter=arbiter,
    )
