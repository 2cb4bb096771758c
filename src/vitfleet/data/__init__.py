"""Images: where they come from, which client has which, and how a batch of them reaches the model.

An image's way: ``sources/`` finds and lists it, ``decode`` makes it a row of a uint8 tensor (``images``), ``subsets``
may hold it out, ``partitions/`` or ``tasks`` give it to a client, ``batches`` puts it into a step, ``preprocess``
augments and normalises it on the training device. Beside that way: ``image_cache`` (decoded images in files),
``export`` (clients' images as files), ``features`` (what is sent instead of images).

No model, no method and no training is here; what a run saves of its partition is in ``partitions/saved``.
"""
