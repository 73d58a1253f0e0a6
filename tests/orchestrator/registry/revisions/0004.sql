ALTER TABLE runs ADD COLUMN scheduler TEXT DEFAULT '' NOT NULL;
ALTER TABLE attempts ADD COLUMN scheduler TEXT DEFAULT '' NOT NULL;
ALTER TABLE lease ADD COLUMN scheduler TEXT DEFAULT '' NOT NULL;
CREATE UNIQUE INDEX ix_lease_scheduler ON lease (scheduler);
UPDATE alembic_version SET version_num='0004' WHERE alembic_version.version_num = '0003';
