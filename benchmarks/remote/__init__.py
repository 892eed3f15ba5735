"""What tiers that machines share cost, against the plain client, and when they are gone."""
