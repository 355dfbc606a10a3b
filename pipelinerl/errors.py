"""Every error this system raises on purpose, in one tree:

PipelineError
    ConfigError          a setting, a model folder or a plug-in is wrong; found before anything runs
        CheckpointDamaged  a checkpoint is not as it was written; names the file
    DataError            a prompt source is empty or malformed; names the file and the line
    EpisodeError         a node does not fit the episode it was appended to
        EpisodeFull      the episode has as many nodes or tokens as one may have
    WireError            bytes from a peer that are not a message this peer may send
    PeerError            a named peer failed
        PeerSilent       it did not answer within its deadline
        PeerGone         its process ended or its connection closed
        PeerFull         it takes nothing, and as much waits for it as may
        PeerRefused      it answered with an error of its own, which the message carries
    LeaseError           another launcher holds this run folder, or has taken it over
    LedgerError          the ledger cannot be written or read, or belongs to another run than the checkpoint
    WeightsError         a published policy does not fit: names, shapes, dtypes, digest, base version
        NoRoom           a policy cannot be put where engines fetch it; they serve on with the one before
    EngineError          the inference engine refused a request or failed in a forward pass
        VersionNotHeld   the request names a version that the engine does not hold
    MismatchError        engine and trainer disagree about log-probabilities of the same weights
    Stalled              the watchdog saw no progress within its limit
    ScriptError          a script asks its controller for what cannot be
        NobodySends        it awaits what nobody will send
        NothingTrained     it publishes, or saves, what was not trained
        TrainedTwice       it trains, or scores, a rollout for a second time
        RolloutsUnread     it leaves rollouts unread that it has asked for
        NotReallocated     its run could not be brought to the engines that it asked for
        ScriptDiverged     it goes on, and calls something else than it did before

A message says what, which one, got, expected, and what to do.
"""


class PipelineError(Exception):
    """Root of the tree: anything this system raises on purpose."""


class ConfigError(PipelineError):
    """A setting, a model folder or a plug-in is wrong; found before anything runs."""


class CheckpointDamaged(ConfigError):
    """A checkpoint is not as it was written; names the file, what was found and what was expected."""


class DataError(PipelineError):
    """A prompt source is empty or malformed."""


class EpisodeError(PipelineError, ValueError):
    """A node does not fit the episode it was appended to. Also a `ValueError`, which refuses one that comes off the wire."""


class EpisodeFull(EpisodeError):
    """An episode has as many nodes or tokens as one may have."""


class WireError(PipelineError):
    """Bytes from a peer that are not a message this peer may send; `reason` is the counter they cost."""

    def __init__(self, message: str, *, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


class PeerError(PipelineError):
    """A named peer failed."""


class PeerSilent(PeerError):
    """A named peer did not answer within its deadline."""


class PeerGone(PeerError):
    """A named peer's process ended or its connection closed."""


class PeerFull(PeerError):
    """A named peer takes nothing, and as much waits for it as may."""


class PeerRefused(PeerError):
    """A named peer answered with an error of its own."""


class LeaseError(PipelineError):
    """Another launcher holds this run folder, or has taken it over."""


class LedgerError(PipelineError):
    """The ledger cannot be written or read, or does not belong to the checkpoint beside it."""


class WeightsError(PipelineError):
    """A published policy does not fit the engine, or its bytes are not what was announced."""


class NoRoom(WeightsError):
    """A policy cannot be put where engines fetch it: a disk or shared memory is full. Engines serve on with the one before."""


class EngineError(PipelineError):
    """The inference engine refused a request or failed in a forward pass."""


class VersionNotHeld(EngineError):
    """A request names a version that the engine does not hold, or not any more."""


class MismatchError(PipelineError):
    """Engine and trainer disagree about the log-probabilities of the same weights."""


class Stalled(PipelineError):
    """Nothing moved within the watchdog's limit."""


class ScriptError(PipelineError):
    """A script asks its controller for what cannot be; raised by the call that asks."""


class NobodySends(ScriptError):
    """A script awaits what nobody will send: rollouts of a policy that it would first have to publish, a step after the last."""


class NothingTrained(ScriptError):
    """A script publishes or saves, and nothing was trained since it did so before."""


class TrainedTwice(ScriptError):
    """A script trains or scores a rollout that was trained, scored or dropped before."""


class RolloutsUnread(ScriptError):
    """A script leaves rollouts unread that it has asked for."""


class NotReallocated(ScriptError):
    """A run could not be brought to the engines that its script asked for; says why, and which engines are not where they should be."""


class ScriptDiverged(ScriptError):
    """A script that goes on calls something else than was recorded; names the call."""
