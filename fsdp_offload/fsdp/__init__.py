"""All private names of torch that the package uses: DTensor, ``fully_shard``, hooks of optimizers, checkpoints.

Seen in torch 2.11, 2.13 and 2.14.1.

=============================================== =======================================================================
private name                                    without it
=============================================== =======================================================================
``DTensor._local_tensor``                       required, as a slot of the class: ``to_local()`` would wrap it for
                                                autograd
``DTensor._spec``, ``TensorMeta``               required, to build a DTensor over host memory: ``from_local`` moves the
                                                data to the mesh's device
``FSDPModule._get_fsdp_state``,                 required
``_fsdp_param_group(s)``, ``_state_ctx``
``FSDPParamGroup`` with ``_HOOKED`` and         overlap="forward" and "iteration" are refused, and in "step" loads begin
``_READ`` of ``fully_shard.py``                 in step()
``FSDPParam`` with ``_READ`` of                 ``OffloadPolicy(parameters=True)`` is refused
``homed.py``
``_sharded_param_data``, ``_unsharded_param``,  required: by sleep, to keep or drop gradients that are not reduced yet,
``unsharded_accumulated_grad``,                 and to leave nothing of a backward that is refused
``_partial_reduce_output``
``Module._apply`` through                       with ``OffloadPolicy(parameters=True)``, ``model.to(device)`` fails in
``_parameters.items()``                         the middle even where it changes nothing
``_storage_Use_Count``,                         required by ``OffloadPolicy(parameters=True)``
``DisableTorchFunctionSubclass``
``_current_graph_task_id``                      required, to refuse a checkpointed block that is computed again after
                                                its update
``_foreach_supported_types``                    required: torch chooses the implementation of a step by it
``_global_optimizer_pre_hooks``,                required: torch's own tables of hooks
``_optimizer_step_pre_hooks``, ``…_post_hooks``
``_StridedShard``, ``_get_fqns``,               required by checkpoints
``_storage_setup``,
``_disabled_torch_function_impl``
``DTensor._spec.shard_order``,                  mesh dimensions are taken from left to right. The second is no name of
``DeviceMesh._shard_order``                     torch's: Megatron-FSDP 0.16.1 sets it, and leaves the spec's as it was
=============================================== =======================================================================
"""
