//! Writes the conversations that fuzzing starts from into a folder, one folder in it for each target. `scripts/fuzz`
//! runs it, and `cargo fuzz cmin` keeps of them and of what fuzzing finds what adds coverage.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let root = PathBuf::from(std::env::args_os().nth(1).unwrap_or_default());
    for (number, (target, seed)) in kvpipe_core::fuzzing::seeds().into_iter().enumerate() {
        let folder = root.join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(format!("seed-{number:03}")), seed)?;
    }
    Ok(())
}
