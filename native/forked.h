// Telling a process from the child it forked.
//
// A forked child has copies of all mappings and descriptors but none of the threads, and peers do not know it.
// It must neither take part nor, when it cleans up, free what belongs to its parent.
#pragma once

namespace syncline {

class Birthplace {
 public:
  Birthplace();
  bool here() const;  // false in a child forked since

 private:
  unsigned generation_;
};

}  // namespace syncline
