"""Rules about requests: delivery, dispatch, retries, liveness. Pure."""
