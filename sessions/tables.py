"""The tables, in portable SQLAlchemy Core. They are made and changed by `migrations/` only; a test compares the two."""

import sqlalchemy as sa

metadata = sa.MetaData(naming_convention={
    "ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s",
})

sessions = sa.Table(
    "sessions", metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("tenant_id", sa.String, nullable=False),
    sa.Column("owner_id", sa.String, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("title", sa.String, nullable=False),
    sa.Column("instructions", sa.String, nullable=False),
    sa.Column("limits", sa.JSON, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    # Not a foreign key: the two tables would need each other before either has a row. Only commit_turn and set_head write it.
    sa.Column("head_turn_id", sa.String),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("updated_at", sa.Double, nullable=False),
    sa.Column("extra", sa.JSON, nullable=False),
    sa.Index(None, "status", "updated_at"),
    sa.Index(None, "tenant_id", "status", "updated_at"),
)

turns = sa.Table(
    "turns", metadata,
    # The order of commits. SQLite numbers rows by itself only if the type is INTEGER.
    sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("session_id", sa.String, sa.ForeignKey("sessions.id", ondelete="CASCADE"), nullable=False),
    sa.Column("id", sa.String, nullable=False),
    sa.Column("parent_id", sa.String),
    sa.Column("branch_index", sa.BigInteger, nullable=False),
    sa.Column("status", sa.String, nullable=False),
    sa.Column("idempotency_key", sa.String),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("finished_at", sa.Double, nullable=False),
    # What the totals sum; before the wide columns, so that summing does not read those.
    sa.Column("counted_tokens", sa.BigInteger, nullable=False),
    sa.Column("counted_images", sa.BigInteger, nullable=False),
    sa.Column("usage", sa.JSON, nullable=False),
    sa.Column("input", sa.JSON, nullable=False),
    sa.Column("output_text", sa.Text, nullable=False),
    # Little-endian uint32, 4 bytes a token.
    sa.Column("input_ids", sa.LargeBinary, nullable=False),
    sa.Column("output_ids", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("session_id", "id"),
    # No cascade: SQLite would recurse along the branch, and refuse beyond 1000 turns.
    sa.ForeignKeyConstraint(["session_id", "parent_id"], ["turns.session_id", "turns.id"]),
    sa.Index(None, "session_id", "idempotency_key", unique=True),
    sa.Index(None, "session_id", "parent_id"),
)

api_keys = sa.Table(
    "api_keys", metadata,
    sa.Column("key_hash", sa.String, primary_key=True),
    sa.Column("tenant_id", sa.String, nullable=False),
    sa.Column("role", sa.String, nullable=False),
    sa.Column("label", sa.String, nullable=False),
)
