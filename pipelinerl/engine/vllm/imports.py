"""What an engine imports, so that every fork of a process that has done it has it, too."""

from __future__ import annotations


def import_everything() -> None:
    """Import what an engine will need, the worker and common model families included. No torch operation is run."""
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.model_executor.models.qwen3
    import vllm.v1.core.sched.scheduler
    import vllm.v1.executor.uniproc_executor
    from vllm.platforms import current_platform

    import pipelinerl.engine.vllm.engine  # noqa: F401

    if current_platform.is_cpu():
        import vllm.v1.worker.cpu_worker  # noqa: F401
