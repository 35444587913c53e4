"""WHAT IS COMPUTED: loading, attention backends, sampling. torch lives here only."""
