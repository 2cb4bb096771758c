"""Running a model as a function of its weights, for one client or for several stacked.

A plain ViT has a forward pass of tensor operations (``functional_vit``), any other family is called as its module
(``module_call``). ``stacked_ops`` are operations whose weights are shared by all clients or have an axis of them,
``batch_norm`` is told in every call whether it trains, ``short_attention`` is a kernel for GPUs.
"""
