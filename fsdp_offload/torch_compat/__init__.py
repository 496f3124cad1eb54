"""All private names of torch that the package uses: DTensor, ``fully_shard``, hooks of optimizers.

==========================  =====================  ================================================================
private name                seen in                without it
==========================  =====================  ================================================================
``DTensor._local_tensor``   2.11 to 2.13           required, as a slot of the class; ``to_local()`` would wrap it
                                                   for autograd
``DTensor._spec``           2.11 to 2.13           required, to build a DTensor over host memory: ``from_local``
                                                   moves the data to the mesh's device
``TensorMeta``              2.11 to 2.13           required, for the same
``_get_fsdp_state``,        2.11 to 2.13           CPUOffloadPolicy is then only recognised by parameters that are on
``_fsdp_param_group(s)``                           the CPU while their mesh is not
``FSDPParamGroup`` with     2.11 to 2.13           overlap="forward" and "iteration" are refused, and in "step" loads
``unshard``, ``wait_for_``                         begin in step()
``unshard``, ``post_``
``backward``, and the
attributes in ``_READ``
``_sharded_param_data``,    2.11 to 2.13           using a model that is asleep is not refused everywhere;
``_unsharded_param``,                              gradients that are not reduced yet stay on the device
``unsharded_accumulated_``
``grad``, ``_partial_``
``reduce_output``
``FSDPParam`` with          2.11 to 2.13           with ``overlap="iteration"``, a second backward before ``step()``
``_unsharded_param``,                              is only noticed by ``step()``, from the gradients
``unsharded_``
``accumulated_grad``
``FSDPParam`` with the      2.11 to 2.13           ``OffloadPolicy(parameters=True)`` is refused
attributes in ``_READ`` of
``sharded_parameter.py``
``Module._apply`` through   2.11 to 2.13           with ``OffloadPolicy(parameters=True)``, ``model.to(device)``
``_parameters.items()``                            fails in the middle even where it changes nothing
``WeakTensorKeyDictionary`` 2.11 to 2.13           required by ``OffloadPolicy(parameters=True)``: ``torch.utils.weak``
                                                   has no documentation
``DisableTorchFunction``    2.11 to 2.13           required by ``OffloadPolicy(parameters=True)`` alone
``Subclass``
``_current_graph_task_id``  2.11 to 2.13           with ``overlap="iteration"``, a checkpointed block that is computed
                                                   again after its update is not refused
``_foreach_supported_``     2.11 to 2.13           assumed to be plain tensors, parameters and DTensors
``types``
``_global_optimizer_pre_``  2.11 to 2.13           global step hooks do not fire
``hooks``, ``…_post_hooks``
``_optimizer_step_pre_``    2.11 to 2.13           required; torch's own tables of an optimizer's hooks
``hooks``, ``…_post_hooks``
``_dynamo/eval_frame.py``   2.11 to 2.13           nobody is told that a compiled ``step`` runs eagerly
==========================  =====================  ================================================================
"""
