"""Problems and verifiers."""
