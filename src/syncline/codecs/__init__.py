"""How a bucket gets smaller and whole again; one page per codec. A codec never communicates: it asks."""
