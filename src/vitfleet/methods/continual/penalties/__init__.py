"""Methods whose loss has a penalty on changes of weights that earlier tasks need. They store no samples."""
