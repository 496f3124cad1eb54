"""verl: an FSDP engine whose optimizer state is in host memory, for ``external_lib`` of its configuration.

    python -m verl.trainer.main_ppo ... actor_rollout_ref.model.external_lib=examples.with_verl \\
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False

State is at home between steps as it is, and ``optimizer_offload`` would have nothing to move. With it on, our functions
answer where the engine calls ``to``.
"""

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from fsdp_offload import OffloadPolicy
from fsdp_offload.integrations.verl import OffloadEngineMixin


# An engine of a vendor goes before verl's own, which is any vendor's.
@EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cuda", vendor="nvidia")
class OffloadEngine(OffloadEngineMixin, FSDPEngineWithLMHead):
    offload_policy = OffloadPolicy(bucket_bytes=64 << 20, device_bytes=512 << 20)
