"""The out-of-tree control messages between SGLang's front process and its scheduler."""

from typing import Any, Dict, List, Optional  # noqa: UP035  (SGLang's decoder resolves these annotations)

from sglang.srt.managers.io_struct import BaseReq


class ControlRequest(BaseReq, kw_only=True):
    op_id: str
    verb: str
    owner: Optional[str] = None                      # noqa: UP045
    sequences: List[Dict[str, Any]] = []             # noqa: UP006, RUF012  {tokens (padded), salt, private_from}
    args: Dict[str, Any] = {}                        # noqa: UP006, RUF012


class ControlAnswer(BaseReq, kw_only=True):
    op_id: str
    ok: bool
    data: Dict[str, Any]                             # noqa: UP006
