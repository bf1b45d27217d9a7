"""A worker of several processes: how its ranks meet, how rank 0 drives them, and how they end together."""
