//! Captures the log of a test's thread.

#[path = "../tests/suite/common/log_lines.rs"]
mod log_lines;

use std::sync::LazyLock;

use log_lines::LogLines;
use tracing::Dispatch;

/// With one subscriber only, tracing asks the thread that logs a line first whether it is wanted, and would keep a "no"
/// of a test that runs beside.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(LogLines::default()));

/// The lines that the calling thread logs meanwhile, from warnings on.
pub(crate) fn logged(run: impl FnOnce()) -> Vec<String> {
    LazyLock::force(&SECOND);
    let lines = LogLines::default();
    tracing::subscriber::with_default(lines.clone(), run);
    lines.get()
}
