"""Every message and every value that flows through the pipeline, in flow order.

    Prompt -> Generate -> Completion -> Trajectory -> ScoredTrajectory -> Group -> Sample -> MicroBatch -> StepClosed -> PolicyPublished

All are frozen: each later one contains the earlier one or is computed from it, and none is edited. On the wire they are tagged by class
name, so a reordered or unknown field is never decoded silently. Token columns are numpy arrays, carried as raw bytes. Columns of one length
are checked on construction, hence also when they come off the wire: a `ValueError` there becomes a `WireError` in the codec. Texts, tuples
and dictionaries have a maximum length, which is checked off the wire before any of them is made. Only a prompt's columns are free in form;
their size and depth are bounded as a whole.

Each conversation has a module of its own, and `base` holds what the conversations share. The package imports nothing heavy.
"""

from __future__ import annotations

from pipelinerl.messages.base import MAX_DEPTH as MAX_DEPTH
from pipelinerl.messages.base import MAX_IMAGE_BYTES as MAX_IMAGE_BYTES
from pipelinerl.messages.base import MAX_IMAGES as MAX_IMAGES
from pipelinerl.messages.base import MAX_REWARD as MAX_REWARD
from pipelinerl.messages.base import UNSAMPLED as UNSAMPLED
from pipelinerl.messages.base import Alive as Alive
from pipelinerl.messages.base import Failed as Failed
from pipelinerl.messages.base import Figures as Figures
from pipelinerl.messages.base import Float32 as Float32
from pipelinerl.messages.base import Id as Id
from pipelinerl.messages.base import Images as Images
from pipelinerl.messages.base import Int32 as Int32
from pipelinerl.messages.base import Mask as Mask
from pipelinerl.messages.base import Message as Message
from pipelinerl.messages.base import Nodes as Nodes
from pipelinerl.messages.base import Outcome as Outcome
from pipelinerl.messages.base import Prompt as Prompt
from pipelinerl.messages.base import Starting as Starting
from pipelinerl.messages.base import Stop as Stop
from pipelinerl.messages.base import Text as Text
from pipelinerl.messages.base import Unread as Unread
from pipelinerl.messages.base import check_depth as check_depth
from pipelinerl.messages.base import check_lengths as check_lengths
from pipelinerl.messages.base import is_reward as is_reward
from pipelinerl.messages.engine import Asleep as Asleep
from pipelinerl.messages.engine import Attempts as Attempts
from pipelinerl.messages.engine import Cancel as Cancel
from pipelinerl.messages.engine import Completion as Completion
from pipelinerl.messages.engine import EngineLoad as EngineLoad
from pipelinerl.messages.engine import EngineReady as EngineReady
from pipelinerl.messages.engine import EngineSequences as EngineSequences
from pipelinerl.messages.engine import Finish as Finish
from pipelinerl.messages.engine import FromEngine as FromEngine
from pipelinerl.messages.engine import Generate as Generate
from pipelinerl.messages.engine import Reattach as Reattach
from pipelinerl.messages.engine import Routes as Routes
from pipelinerl.messages.engine import Sampling as Sampling
from pipelinerl.messages.engine import Shards as Shards
from pipelinerl.messages.engine import Sleep as Sleep
from pipelinerl.messages.engine import StageWeights as StageWeights
from pipelinerl.messages.engine import Tensor as Tensor
from pipelinerl.messages.engine import ToEngine as ToEngine
from pipelinerl.messages.engine import Tokens as Tokens
from pipelinerl.messages.engine import Transports as Transports
from pipelinerl.messages.engine import WeightsCommitted as WeightsCommitted
from pipelinerl.messages.engine import WeightsRefused as WeightsRefused
from pipelinerl.messages.engine import WeightsStaged as WeightsStaged
from pipelinerl.messages.gateway import NO_NODE as NO_NODE
from pipelinerl.messages.gateway import AgentTurn as AgentTurn
from pipelinerl.messages.gateway import EpisodeEnded as EpisodeEnded
from pipelinerl.messages.gateway import EpisodeExtended as EpisodeExtended
from pipelinerl.messages.gateway import EpisodeFinished as EpisodeFinished
from pipelinerl.messages.gateway import EpisodeLent as EpisodeLent
from pipelinerl.messages.gateway import EpisodeReturned as EpisodeReturned
from pipelinerl.messages.gateway import EpisodeUnwanted as EpisodeUnwanted
from pipelinerl.messages.gateway import EpisodeWanted as EpisodeWanted
from pipelinerl.messages.gateway import FromGateway as FromGateway
from pipelinerl.messages.gateway import GatewayLoad as GatewayLoad
from pipelinerl.messages.gateway import GatewayReady as GatewayReady
from pipelinerl.messages.gateway import LeaseEnd as LeaseEnd
from pipelinerl.messages.gateway import Lent as Lent
from pipelinerl.messages.gateway import Posted as Posted
from pipelinerl.messages.gateway import ToGateway as ToGateway
from pipelinerl.messages.gateway import TurnSampled as TurnSampled
from pipelinerl.messages.gateway import TurnTokens as TurnTokens
from pipelinerl.messages.gateway import part_of as part_of
from pipelinerl.messages.prm import EarlyStopDecision as EarlyStopDecision
from pipelinerl.messages.prm import PrmLoad as PrmLoad
from pipelinerl.messages.prm import PrmReady as PrmReady
from pipelinerl.messages.prm import StepsScored as StepsScored
from pipelinerl.messages.prm import TraceScores as TraceScores
from pipelinerl.messages.prm import TraceTokens as TraceTokens
from pipelinerl.messages.rollouts import Group as Group
from pipelinerl.messages.rollouts import Sample as Sample
from pipelinerl.messages.rollouts import Score as Score
from pipelinerl.messages.rollouts import ScoredTrajectory as ScoredTrajectory
from pipelinerl.messages.rollouts import TerminalStatus as TerminalStatus
from pipelinerl.messages.rollouts import Trajectory as Trajectory
from pipelinerl.messages.scorer import CancelRequest as CancelRequest
from pipelinerl.messages.scorer import EndEpisode as EndEpisode
from pipelinerl.messages.scorer import FromScorer as FromScorer
from pipelinerl.messages.scorer import FunctionFailed as FunctionFailed
from pipelinerl.messages.scorer import FunctionKind as FunctionKind
from pipelinerl.messages.scorer import FunctionLoad as FunctionLoad
from pipelinerl.messages.scorer import Observation as Observation
from pipelinerl.messages.scorer import Request as Request
from pipelinerl.messages.scorer import RequestKind as RequestKind
from pipelinerl.messages.scorer import Result as Result
from pipelinerl.messages.scorer import RewardModelLoad as RewardModelLoad
from pipelinerl.messages.scorer import RewardProcess as RewardProcess
from pipelinerl.messages.scorer import ScorerLoad as ScorerLoad
from pipelinerl.messages.scorer import ScorerReady as ScorerReady
from pipelinerl.messages.scorer import ScorerTask as ScorerTask
from pipelinerl.messages.scorer import ToScorer as ToScorer
from pipelinerl.messages.scorer import Turns as Turns
from pipelinerl.messages.serving import CloseModel as CloseModel
from pipelinerl.messages.serving import ForwardBackward as ForwardBackward
from pipelinerl.messages.serving import ForwardBackwardDone as ForwardBackwardDone
from pipelinerl.messages.serving import FromServingTrainer as FromServingTrainer
from pipelinerl.messages.serving import LoadModel as LoadModel
from pipelinerl.messages.serving import OpenModel as OpenModel
from pipelinerl.messages.serving import OptimizerStep as OptimizerStep
from pipelinerl.messages.serving import OptimizerStepDone as OptimizerStepDone
from pipelinerl.messages.serving import PublishModel as PublishModel
from pipelinerl.messages.serving import RequestDone as RequestDone
from pipelinerl.messages.serving import RequestFailed as RequestFailed
from pipelinerl.messages.serving import SaveModel as SaveModel
from pipelinerl.messages.serving import ServingTrainerReady as ServingTrainerReady
from pipelinerl.messages.serving import ToServingTrainer as ToServingTrainer
from pipelinerl.messages.serving import TrainingAnswer as TrainingAnswer
from pipelinerl.messages.serving import TrainingRequest as TrainingRequest
from pipelinerl.messages.trainer import CheckpointFailed as CheckpointFailed
from pipelinerl.messages.trainer import CheckpointSaved as CheckpointSaved
from pipelinerl.messages.trainer import Command as Command
from pipelinerl.messages.trainer import ComputeLogprobs as ComputeLogprobs
from pipelinerl.messages.trainer import Damage as Damage
from pipelinerl.messages.trainer import Demonstration as Demonstration
from pipelinerl.messages.trainer import EndTraining as EndTraining
from pipelinerl.messages.trainer import EngineMismatch as EngineMismatch
from pipelinerl.messages.trainer import FromTrainer as FromTrainer
from pipelinerl.messages.trainer import LayoutFixed as LayoutFixed
from pipelinerl.messages.trainer import LogprobModel as LogprobModel
from pipelinerl.messages.trainer import LogprobsComputed as LogprobsComputed
from pipelinerl.messages.trainer import MicroBatch as MicroBatch
from pipelinerl.messages.trainer import PolicyHeld as PolicyHeld
from pipelinerl.messages.trainer import PolicyPublished as PolicyPublished
from pipelinerl.messages.trainer import SaveCheckpoint as SaveCheckpoint
from pipelinerl.messages.trainer import StepClosed as StepClosed
from pipelinerl.messages.trainer import StepDone as StepDone
from pipelinerl.messages.trainer import TakeMicroBatch as TakeMicroBatch
from pipelinerl.messages.trainer import ToTrainer as ToTrainer
from pipelinerl.messages.trainer import TrainerReady as TrainerReady
from pipelinerl.messages.trainer import TrainingEnded as TrainingEnded
from pipelinerl.messages.trainer import WeightBufferReleased as WeightBufferReleased
