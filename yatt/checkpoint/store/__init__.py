"""A store of objects: folders and URLs of fsspec, their faults and retries."""
