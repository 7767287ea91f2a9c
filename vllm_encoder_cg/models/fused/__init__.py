# SPDX-License-Identifier: Apache-2.0
"""Forwards of vLLM's towers with fewer kernels, for capture.

A fused tower is called like the vLLM tower that it is made from and computes the
same on the same parameters, which stay where they are:

- ``modules.py``: residual addition and norm in one kernel; an activation in the
  epilogue of the product before it where the library offers that, else in one
  kernel; linears that are sharded, quantised or wrapped keep their own forward;
- ``attention.py``: q and k are rotated where the projection left them, and the
  attention kernel reads them there; what all layers share is computed once;
- ``windows.py``: windows of one tile, rotated and attended in one kernel;
- ``blocks.py``: a block out of these, and a stack of blocks in which the last
  addition of one is fused with the first norm of the next;
- ``siglip_layer.py``: a layer of SigLIP as a block, for the towers that have those;
- ``merger.py``: the step behind the blocks of Qwen's towers;
- ``alongside.py``: what nothing waits for, as a branch of the graph;
- a file per tower, named as its adapter's module, by which ``registry.py`` tells that
  there is one: how its modules make up blocks, and what comes before and after;
- ``fusable.py``: the adapter's side of it.

What a module here does not know exactly raises ``FusionRefusedError`` when the fused
tower is made, and the tower is captured as vLLM runs it.
"""
