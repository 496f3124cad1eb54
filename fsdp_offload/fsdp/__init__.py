"""Private names of torch that the package uses: DTensor, ``fully_shard``, hooks of optimizers, checkpoints.

Seen in torch 2.11, 2.13 and 2.14.1; of newer versions, only their unreduced gradients (``is_unreduced``). Required:

- ``DTensor._local_tensor``, as a slot of the class: ``to_local()`` would wrap it for autograd;
- ``DTensor._spec`` and ``TensorMeta``: ``from_local`` would move host memory to the mesh's device;
- ``FSDPModule._get_fsdp_state``, ``_fsdp_param_group(s)``, ``_state_ctx``;
- for sleep, and to clean up after a refused backward: ``_sharded_param_data``, ``_unsharded_param``,
  ``unsharded_accumulated_grad``, ``_partial_reduce_output``;
- for a checkpointed block that is computed again after its update: ``_current_graph_task_id``;
- for steps: ``_foreach_supported_types``, by which torch chooses an implementation; ``_global_optimizer_pre_hooks``,
  ``_optimizer_step_pre_hooks``, ``…_post_hooks``;
- for checkpoints: ``_StridedShard``, ``_get_fqns``, ``_storage_setup``, ``_disabled_torch_function_impl``.

Without ``FSDPParamGroup``'s ``_HOOKED`` and ``_READ`` (``fully_shard.py``), overlap="forward" and "iteration" are
refused, and with "step" loads begin in step(). ``OffloadPolicy(parameters=True)`` requires ``FSDPParam``'s ``_READ``
(``homed.py``), ``_storage_Use_Count`` and ``DisableTorchFunctionSubclass``. It relies on ``Module._apply`` to iterate
over ``_parameters.items()``: otherwise ``model.to(device)`` fails half way, even if it changes nothing. If gathers do
not read local tensors by ``FSDPParam._sharded_local_tensor``, each gather waits for its parameters' home. Without
``DTensor._spec.shard_order`` and ``DeviceMesh._shard_order`` (Megatron-FSDP 0.16.1 sets the latter, and leaves the
spec's as it was), mesh dimensions are taken from left to right.
"""
