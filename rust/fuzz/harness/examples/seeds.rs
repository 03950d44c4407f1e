//! Writes the seeds into a folder, with one folder in it for each target. `scripts/fuzz keep` runs it.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let root = PathBuf::from(std::env::args_os().nth(1).unwrap_or_default());
    for (number, (target, seed)) in kvpipe_fuzz_harness::seeds().into_iter().enumerate() {
        let folder = root.join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(format!("seed-{number:03}")), seed)?;
    }
    Ok(())
}
