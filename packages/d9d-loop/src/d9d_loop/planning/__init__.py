"""Planning of jobs: memory, communication, FLOPs and step time on a cluster."""

from typing import TYPE_CHECKING

from d9d_dist.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from d9d_loop.planning.collective_log import Collective as Collective
    from d9d_loop.planning.decoder_shape import DecoderShape as DecoderShape
    from d9d_loop.planning.dry_runs import dry_run as dry_run
    from d9d_loop.planning.goodput_model import Goodput as Goodput
    from d9d_loop.planning.goodput_model import goodput as goodput
    from d9d_loop.planning.hardware_spec import Device as Device
    from d9d_loop.planning.hardware_spec import Fitted as Fitted
    from d9d_loop.planning.hardware_spec import Hardware as Hardware
    from d9d_loop.planning.hardware_spec import Links as Links
    from d9d_loop.planning.hardware_spec import Network as Network
    from d9d_loop.planning.hardware_spec import hardware_names as hardware_names
    from d9d_loop.planning.job_plan import ClusterPlan as ClusterPlan
    from d9d_loop.planning.job_plan import RankMemory as RankMemory
    from d9d_loop.planning.job_plan import describe as describe
    from d9d_loop.planning.job_plan import plan_cluster as plan_cluster
    from d9d_loop.planning.layout_search import Candidate as Candidate
    from d9d_loop.planning.layout_search import SearchResult as SearchResult
    from d9d_loop.planning.layout_search import SearchSpace as SearchSpace
    from d9d_loop.planning.layout_search import legal_layouts as legal_layouts
    from d9d_loop.planning.layout_search import nearest_layouts as nearest_layouts
    from d9d_loop.planning.layout_search import search_layouts as search_layouts
    from d9d_loop.planning.memory_size import Memory as Memory
    from d9d_loop.planning.memory_size import memory_of as memory_of
    from d9d_loop.planning.plan_layout import PlanLayout as PlanLayout
    from d9d_loop.planning.plan_report import report as report
    from d9d_loop.planning.plan_report import verdict as verdict
    from d9d_loop.planning.plan_report import warn_if_too_large as warn_if_too_large
    from d9d_loop.planning.rank_run import DryRun as DryRun
    from d9d_loop.planning.rank_run import fake_ranks as fake_ranks
    from d9d_loop.planning.rank_run import gradient_bytes as gradient_bytes
    from d9d_loop.planning.rank_run import optimizer_bytes as optimizer_bytes
    from d9d_loop.planning.rank_run import parameter_bytes as parameter_bytes
    from d9d_loop.planning.rank_run import representatives as representatives
    from d9d_loop.planning.step_model import StepTime as StepTime
    from d9d_loop.planning.step_model import step_time as step_time
    from d9d_loop.planning.step_record import Operation as Operation
    from d9d_loop.planning.step_record import StepRecord as StepRecord
    from d9d_loop.planning.step_record import recorded as recorded
else:
    __getattr__, __dir__ = lazy_exports(__name__)
