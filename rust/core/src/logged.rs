//! What a test logs on its thread.

#[path = "../tests/suite/common/log_lines.rs"]
mod log_lines;

use log_lines::LogLines;

/// The lines that the calling thread logs meanwhile, from warnings on.
pub(crate) fn logged(run: impl FnOnce()) -> Vec<String> {
    let lines = LogLines::default();
    tracing::subscriber::with_default(lines.clone(), run);
    lines.get()
}
