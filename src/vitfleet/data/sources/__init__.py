"""Where images come from: registered data sets, folders, parquet files, the hub, and a user's own objects.

``load`` finds a data set by the table ``data``; ``named`` has the built-in ones. A reader (``image_folder``,
``folder_layouts``, ``tables``, ``hub``) lists encoded images and decodes none. ``from_objects`` takes tensors and
objects of the ``datasets`` library; ``local`` reads the images of a device of a real fleet.
"""
