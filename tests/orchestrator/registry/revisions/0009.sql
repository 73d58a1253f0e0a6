ALTER TABLE attempts ADD COLUMN smaller_world TEXT;
UPDATE alembic_version SET version_num='0009';
