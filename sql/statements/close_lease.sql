DELETE FROM leases WHERE holder = $1::UUID AND NOT EXISTS (SELECT 1 FROM claims c WHERE c.holder = $1::UUID)
