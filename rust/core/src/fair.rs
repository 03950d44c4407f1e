//! Room that peers share. One peer may have all of it while nobody else wants any; once it is full, whoever has most of it
//! makes place for one who has less, so that none can shut out others.

use std::collections::HashMap;

use crate::node::LinkId;

/// Lets `one` wait among at most `cap`, and returns what may not: nothing while there is room, else the latest of the peer
/// that has most.
pub(crate) fn admit<T>(
    waiting: &mut Vec<T>,
    cap: usize,
    one: T,
    link_of: impl Fn(&T) -> LinkId,
) -> Option<T> {
    if waiting.len() < cap {
        waiting.push(one);
        return None;
    }
    let mut held: HashMap<LinkId, usize> = HashMap::new();
    for other in waiting.iter() {
        *held.entry(link_of(other)).or_default() += 1;
    }
    let most = held.values().copied().max().unwrap_or(0);
    // With one less than another it would only change places with it, again and again.
    if held.get(&link_of(&one)).map_or(0, |ours| *ours) + 1 >= most {
        return Some(one);
    }
    let has_most = |other: &T| held.get(&link_of(other)) == Some(&most);
    let Some(latest) = waiting.iter().rposition(has_most) else {
        return Some(one);
    };
    let displaced = waiting.remove(latest);
    waiting.push(one);
    Some(displaced)
}

/// Tells a peer why one of its `what` may not wait.
pub(crate) fn crowded(what: &str, cap: usize) -> String {
    format!(
        "{cap} {what} wait here, more cannot, and no other peer has more of them than this one; ask for fewer at once"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAP: usize = 12;

    type Waiting = Vec<(LinkId, usize)>;

    fn come(waiting: &mut Waiting, link: LinkId, n: usize) -> Option<(LinkId, usize)> {
        admit(waiting, CAP, (link, n), |(link, _)| *link)
    }

    fn filled_by(link: LinkId) -> Waiting {
        let mut waiting = Vec::new();
        for n in 0..CAP {
            assert_eq!(come(&mut waiting, link, n), None);
        }
        waiting
    }

    fn held(waiting: &Waiting, link: LinkId) -> usize {
        waiting.iter().filter(|(other, _)| *other == link).count()
    }

    #[test]
    fn one_peer_alone_has_all_the_room_and_no_more() {
        let mut waiting = filled_by(1);
        assert_eq!(come(&mut waiting, 1, CAP), Some((1, CAP)));
        assert_eq!(waiting.len(), CAP);
    }

    #[test]
    fn the_latest_of_who_has_most_makes_place() {
        let mut waiting = filled_by(1);
        assert_eq!(come(&mut waiting, 2, 0), Some((1, CAP - 1)));
        assert_eq!(come(&mut waiting, 2, 1), Some((1, CAP - 2)));
        assert_eq!(waiting.len(), CAP);
    }

    #[test]
    fn in_the_end_all_have_as_much_whoever_came_first_or_asks_most() {
        let mut waiting = filled_by(1);
        for n in 0..CAP {
            for link in [1, 2, 3, 1, 1] {
                come(&mut waiting, link, n);
            }
        }
        assert_eq!([1, 2, 3].map(|link| held(&waiting, link)), [CAP / 3; 3]);
    }
}
