"""The schema's history, as Alembic revisions. They ship in the package and need no alembic.ini."""

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from ..errors import SchemaTooNew


def config() -> Config:
    """For Alembic's own commands too (a new revision, say)."""
    found = Config()
    found.set_main_option("script_location", f"{__name__}:")
    found.set_main_option("path_separator", "os")
    return found


def migrate(connection: Connection) -> None:
    """Bring the database to the newest revision, inside the caller's transaction. Raises SchemaTooNew."""
    settings = config()
    known = {revision.revision for revision in ScriptDirectory.from_config(settings).walk_revisions()}
    found = set(MigrationContext.configure(connection).get_current_heads())
    if found - known:
        raise SchemaTooNew(f"the database has the schema {', '.join(sorted(found - known))}, this release knows "
                           f"{', '.join(sorted(known))}: use the release that wrote it, or a later one")
    settings.attributes["connection"] = connection
    command.upgrade(settings, "head")
