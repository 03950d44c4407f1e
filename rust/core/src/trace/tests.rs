use std::path::PathBuf;

use super::*;

const ID: HandoffId = [0xab; 16];

fn file(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("kvpipe-{name}-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    path
}

fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    std::fs::remove_file(path).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn number(line: &str, name: &str) -> f64 {
    let (_, rest) = line.split_once(&format!(r#""{name}":"#)).unwrap();
    rest.split(',').next().unwrap().parse().unwrap()
}

#[test]
fn several_processes_write_whole_lines_to_one_list() {
    let path = file("shared-trace");
    let writers: Vec<_> = (0..4)
        .map(|number| {
            let trace = Trace::to_file(&path, "worker").unwrap();
            std::thread::spawn(move || {
                for _ in 0..200 {
                    trace.instant(Track::Reactor, "arrived", &ID, &[("writer", number)]);
                }
            })
        })
        .collect();
    for writer in writers {
        writer.join().unwrap();
    }
    let lines = lines(&path);
    assert_eq!(lines.len(), 1 + 4 * (3 + 200));
    assert_eq!(lines[0], "[");
    let is_whole = |line: &String| line.starts_with(r#"{"name":""#) && line.ends_with("}},");
    assert!(lines[1..].iter().all(is_whole));
}

#[test]
fn a_span_says_when_it_began_and_how_long_it_took() {
    let path = file("span-trace");
    let trace = Trace::to_file(&path, "worker").unwrap();
    let began = trace.now();
    std::thread::sleep(Duration::from_millis(20));
    trace.span(Track::Engine, "computed", &ID, began, &[("layer", 3)]);
    drop(trace);
    let line = lines(&path).pop().unwrap();
    assert!((number(&line, "ts") - began.as_secs_f64() * 1e6).abs() < 1.0);
    assert!(number(&line, "dur") >= 20_000.0);
    assert!(line.contains(r#""args":{"handoff":"abababababababababababababababab","layer":3}"#));
}

#[test]
fn spans_that_follow_each_other_do_so_in_the_trace() {
    let path = file("following-trace");
    let trace = Trace::to_file(&path, "worker").unwrap();
    let began = Instant::now();
    let ends = [1, 2, 3].map(|micros| began + Duration::from_micros(micros));
    for (began, ended) in [(began, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])] {
        trace.overlapping(&ID, ("moved", began, ended), &[]);
    }
    drop(trace);
    let lines = lines(&path);
    let times: Vec<_> = lines[4..].iter().map(|line| number(line, "ts")).collect();
    assert_eq!(times.len(), 6);
    let apart = [times[2] - times[1], times[4] - times[3]];
    assert!(apart.iter().all(|micros| micros.abs() < 0.001), "{apart:?}");
}

#[test]
fn a_name_cannot_break_the_line() {
    let path = file("name-trace");
    drop(Trace::to_file(&path, "a\"b\\c\nd").unwrap());
    assert!(lines(&path)[1].contains(r#""args":{"name":"abcd"}"#));
}

#[test]
fn a_file_that_cannot_be_written_is_an_error() {
    let error = Trace::to_file(Path::new("/nowhere/trace"), "worker").unwrap_err();
    assert!(error.to_string().contains("/nowhere/trace"), "{error}");
}

#[test]
fn nothing_is_traced_by_default() {
    let trace = Trace::default();
    trace.instant(Track::Reactor, "arrived", &ID, &[]);
    assert!(!trace.is_on());
    assert_eq!(trace.now(), Duration::ZERO);
}
