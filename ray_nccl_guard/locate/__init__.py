"""Which rank, node or link: small worlds of disposable children until the fault has nowhere left to hide."""
